"""``verify(bits=True)``: the same steps on one rank and on several, compared to the last bit."""
