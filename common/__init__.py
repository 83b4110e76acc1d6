"""Code that several processes share: exceptions, settings, and the folders' contracts. Imports only `protos`."""
