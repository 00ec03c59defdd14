"""What a process of ours needs around its work: logs, tracing, systemd notification, version."""
