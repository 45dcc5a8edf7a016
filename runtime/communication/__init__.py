"""Communication between ranks: transports, and collectives on top of them."""
