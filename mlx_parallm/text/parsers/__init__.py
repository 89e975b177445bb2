"""Reasoning and tool calls in the text that models write, a file per format."""
