"""Where a model thinks aloud before it answers: in its text, for readers, and in its tokens, for a budget."""
