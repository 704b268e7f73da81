"""The command line, ``lora-slots`` (extra ``cli``)."""
