"""Which layers of a model take slots, and giving them theirs; makes the Layout."""
