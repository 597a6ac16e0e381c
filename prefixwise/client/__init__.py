"""The clients of a server: `Client` and `AsyncClient` have the methods and results of `Scorer`.

    body -> contract/server_results.py: Call (wrong requests are not sent)
         -> attempts.py: POST within the seconds that are left, and again where the server is busy
         -> contract/server_results.py: the result, or the exception that the server raised

Connections are kept open and shared: by threads (`client.py`), or by the calls of an event loop (`async_client.py`).
"""
