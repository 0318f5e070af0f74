"""The HTML page of a compiled step: from the files of its dump to one file that needs no server and no network."""
