"""Services for a process of ours: logs, tracing, systemd notification, version."""
