"""What a forward is made of: tokens fed, the passes they are packed into, what runs ahead, the memory of the pool."""
