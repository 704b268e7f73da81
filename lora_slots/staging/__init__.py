"""Adapter + Layout -> StagedAdapter: checked, cast and packed on the host. Writes into no model."""
