"""Real models, built small from their configs: a zoo of architectures, and what a compiled step does to each."""
