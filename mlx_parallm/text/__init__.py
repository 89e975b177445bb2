"""Text on callers' threads: prompts, detokenising, grammars, and the parsers of tool calls and reasoning."""
