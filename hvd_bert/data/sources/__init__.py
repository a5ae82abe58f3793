"""From a file or the hub to checked examples."""
