"""Training scripts with three refusals each; a refused line ends with a mark."""
