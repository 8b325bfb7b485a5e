"""Show: heads as terminal tables and as pictures, from plain tensors and the names of the tokens."""
