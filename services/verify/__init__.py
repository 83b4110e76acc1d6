"""The verify service: checks the draft's tokens with the target model, and samples."""
