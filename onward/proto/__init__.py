"""The messages between processes: frozen structs without behaviour. Read this package first.

`SCHEMA_VERSION` is part of every handshake. Processes of different versions refuse each other instead of misreading.
"""

SCHEMA_VERSION = 7
