"""Handlers, by topic. A handler is a coroutine function of the service and a request's context."""
