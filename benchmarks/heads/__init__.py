"""What drafts from the target's own states, or from none, bring to co-located generation."""
