"""Keys and values: slots of running rows, blocks of cached prompts, and their tier on SSD."""
