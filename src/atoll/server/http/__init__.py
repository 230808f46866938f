"""HTTP itself: connections, authentication, routes, errors, streams and the OpenAPI document."""
