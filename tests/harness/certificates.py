"""TLS certificates of an authority that only the test knows."""

from __future__ import annotations

from pathlib import Path

import trustme


class Certificates:
    """Files of an authority, of a server's certificate for loopback, and of a client's."""

    def __init__(self, folder: Path) -> None:
        """Writes all of them."""
        authority = trustme.CA()
        server, client = authority.issue_cert("127.0.0.1", "localhost"), authority.issue_cert("client@example.org")
        self.ca, self.cert, self.key = folder / "ca.pem", folder / "cert.pem", folder / "key.pem"
        self.client_cert, self.client_key = folder / "client-cert.pem", folder / "client-key.pem"
        authority.cert_pem.write_to_path(self.ca)
        server.cert_chain_pems[0].write_to_path(self.cert)
        server.private_key_pem.write_to_path(self.key)
        client.cert_chain_pems[0].write_to_path(self.client_cert)
        client.private_key_pem.write_to_path(self.client_key)
