"""What is kept between forward and backward, and where."""
