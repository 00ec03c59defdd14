"""Engines that run the target model behind one small protocol (`backends.base`)."""
