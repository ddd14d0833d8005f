"""macOS guests: what follows for the cluster (`facts`), and full Metal speed for programs that profit (`vm run`)."""
