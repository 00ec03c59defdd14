"""The realisation with real TCP: two network namespaces joined by TUN devices."""
