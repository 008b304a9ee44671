"""Combines several proposers of one configuration, on the host (`cascade.py`) or on the device (`on_device.py`). The
gate (`gate/`) decides how many tokens each stage drafts."""
