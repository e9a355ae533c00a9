"""The messages between processes: frozen structs without behaviour. Read this folder to know what can be said.

`SCHEMA_VERSION` is part of every handshake. Processes of different versions refuse each other instead of misreading.
"""

SCHEMA_VERSION = 6
