"""What a step begins with: its inputs taken over from the host, embeddings of which a rank holds some, and angles."""
