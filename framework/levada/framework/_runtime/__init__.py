"""Internals of the runtime; nothing outside `levada.framework` imports from this package."""
