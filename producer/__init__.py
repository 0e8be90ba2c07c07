"""trtq's producer: push inference tasks into Redis, get results back.

    from producer import Client

    with Client() as client:
        ticket = client.submit("digits", image)
        scores = ticket.result(timeout=5)
"""
