"""Several servers of the same models behind one front, on Ray."""
