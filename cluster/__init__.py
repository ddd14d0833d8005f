"""The coordinator: finds the Macs, plans, launches and watches the ranks, and serves the OpenAI-compatible API."""
