"""The paper's claims as checks that run."""
