"""What a program is: its types, what may be done to it, how it is checked, printed, run and reported."""
