"""OpenAI's request and response shapes. No HTTP."""
