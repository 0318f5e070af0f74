"""What a certificate of a step with experts knows of the rows that go to them."""
