"""From a program to a callable over live storages."""
