"""The nouns of Suika: pure data and rules. Parses text, opens nothing, imports nothing of ours."""
