"""trtq's producer: push inference tasks into Redis, get results back.

from producer import Client

with Client() as client:
    ticket = client.submit("digits", image)
    scores = ticket.result(timeout=5)
"""

from producer.aio import AsyncClient
from producer.client import Client
from producer.config import ProducerSettings
from producer.spec import ModelSpec, TensorSpec
from producer.ticket import Ticket

__all__ = ["AsyncClient", "Client", "ModelSpec", "ProducerSettings", "TensorSpec", "Ticket"]
