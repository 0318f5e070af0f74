"""Real models, built small from their configs: a zoo of architectures, each trained by a compiled step and compared."""
