"""Terminal output: coloured text, the live view, the chat prompt. Imports session, config and all below."""
