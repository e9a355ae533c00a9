"""Pages of the documentation site that are generated from the code, and links from pages to files outside `docs/`."""
