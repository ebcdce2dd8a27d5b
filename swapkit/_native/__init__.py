"""The native core and its handles: backends, streams, pools; the only floor that uses cffi."""
