"""Programs: their types, the edits they allow, and how they are checked, printed, run and reported."""
