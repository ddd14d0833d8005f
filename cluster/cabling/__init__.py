"""Which Macs are joined by which cables, and the hostfiles that say so. Pure."""
