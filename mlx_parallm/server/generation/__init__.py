"""From a call in no dialect to completions: prompts, tokenising, choices, and how they are sent."""
