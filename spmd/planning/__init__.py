"""Plans: how long a step would take on machines that are not here, and which layout of it is best."""
