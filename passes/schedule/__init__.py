"""When things happen in a step: what each node costs, and one rank's time simulated from that."""
