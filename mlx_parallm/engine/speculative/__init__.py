"""Drafts of what rows may say next, which one step verifies: a token is kept where it is the one that is sampled."""
