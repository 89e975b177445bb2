"""What is to be learnt: problems, their scores, environments of several turns."""
