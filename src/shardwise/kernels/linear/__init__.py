"""Linear layers over weights of any format."""
