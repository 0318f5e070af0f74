"""Passes that remove what nobody needs, so that all that follow match smaller and more uniform graphs."""
